"""What several tests share: data, sites, methods, commands, and slow twins."""
