"""The app of each site: what Unskew's client does, on this site's examples."""

from unskew.flower import client_app

from .data import examples, test_examples

app = client_app(examples, test_examples, __package__)
