"""The papers' analyses of models, features and statistics: pure functions that read no files and draw nothing."""
