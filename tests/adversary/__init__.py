"""Attacks on Unskew from outside: mutated files, a malicious site, kills. `python -m adversary --help` runs them.

What is here was written from the documents and from the file format, not from the code's own checks. Files are forged
with no help of the product (`forging`), so that a check can't be fooled by the code that it is meant for.
"""
