"""The conversation between a server and its sites: task, statistics, candidate heads, answers."""
