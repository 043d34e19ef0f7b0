"""How far two trainings are apart."""

import torch


def everything(last):
    """All tensors that a federation holds after a round."""
    tree = {**last.params, **{f"state/{k}": v for k, v in last.state.items()}}
    for id, client in last.clients.items():
        tree |= {f"{id}/own/{k}": v for k, v in client.own.items()} | {
            f"{id}/memory/{k}": v for k, v in client.memory.items()
        }
    return tree


def gap(first, second):
    a, b = everything(first), everything(second)
    assert a.keys() == b.keys()
    return torch.stack([(a[name] - b[name]).abs().max() for name in a]).max().item()  # NaN, if one is
