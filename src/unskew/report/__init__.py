"""The report of a run, of several runs, or of a federation of files: figures, and one page that needs no network."""
