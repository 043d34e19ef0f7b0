"""Files: limits, checked reading, sealed and atomic writing, streams, locks, downloads, signatures."""
