"""What the documentation's site shows and nobody types: made from the code and the results when the site is built."""
