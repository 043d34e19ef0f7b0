"""The app of each node: Flower's training; the last line is what calibration adds."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from flower_app import task
from unskew.flower import with_calibration

app = ClientApp()


def data_of(context: Context) -> DataLoader:
    """The training data of the node that this is."""
    node = context.node_config
    return task.load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the server's weights on this node's data."""
    torch.set_num_threads(1)
    torch.manual_seed(context.node_config["partition-id"])
    net, data = task.Net(), data_of(context)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = task.train(net, data, context.run_config["local-epochs"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


app = with_calibration(app, task.Net, data_of, keys=("img", "label"))
