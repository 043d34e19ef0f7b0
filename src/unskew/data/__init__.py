"""Data: data sets and their readers, the data of one site, preparation, partitions into clients."""
