"""The examples of a site: batches of prepared inputs and of labels, always in the same order.

A site names its data when it starts its SuperNode: `--node-config 'site="clinic_a" data="/data/train"'`, a folder with
a folder of images for each class, an .npz or a .csv file. To read something else, give tensors of your own:

    def examples(context):
        x, y = my_reader(context.node_config["data"])  # float32, prepared; int64
        return zip(x.split(64), y.split(64))
"""

from collections.abc import Iterable

from flwr.app import Context
from torch import Tensor

from unskew.flower import own, part_of


def examples(context: Context) -> Iterable[tuple[Tensor, Tensor]]:
    """The examples that this site trains on, and takes statistics of."""
    if "data" in context.node_config:
        return own(context, "data")
    return part_of(context, "digits", alpha=0.3)  # in a simulation


def test_examples(context: Context) -> Iterable[tuple[Tensor, Tensor]] | None:
    """Those that models are scored on; None where this site has none."""
    if "test" in context.node_config:
        return own(context, "test")
    return None if "data" in context.node_config else part_of(context, "digits", part="test")
