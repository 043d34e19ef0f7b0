"""A federation on Flower with Unskew."""
