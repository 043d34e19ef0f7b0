"""Feature statistics: moments and their sums, collecting them, files of them, and what is implausible."""
