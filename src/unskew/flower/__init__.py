"""Unskew on Flower: an app that trains and calibrates, calibration for apps of others, and an engine.

client_app, server_app          the two halves of an app, as `unskew flower init` writes it
with_calibration, calibrate_over    calibration for a ClientApp and a ServerApp of your own
own, part_of                    where the examples of a site come from
write_certificates, write_keys  TLS for the server, and keys by which sites prove who they are; write_all: both
Flower                          the engine of `unskew run --engine flower`
"""

from unskew.flower.app import client_app as client_app, server_app as server_app
from unskew.flower.deployment.certificates import (
    write_all as write_all,
    write_certificates as write_certificates,
    write_keys as write_keys,
)
from unskew.flower.engine import Flower as Flower
from unskew.flower.post_hoc import calibrate_over as calibrate_over, with_calibration as with_calibration
from unskew.flower.sources import own as own, part_of as part_of
