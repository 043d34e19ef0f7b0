"""Transports of our own: what carries the conversation of `protocol` between a server and its sites.

`in_process` is that of a simulation. `examples/` has others, between processes through a folder and by NVFlare, and
`flower.talking` is Flower's; the commands carry messages by files that people send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from unskew.conversation.errands import Batches
from unskew.conversation.messages import Fault, Request, Statistics
from unskew.conversation.protocol import Replies, reply
from unskew.conversation.roster import Sent
from unskew.errors import UnskewError, expect, one_line
from unskew.models.networks import Split


def in_process(model: Split, data: Mapping[str, Batches]) -> Callable[[Request], Replies]:
    """The transport of a simulation: all sites live here, each with its batches, which can be gone through twice.
    A site whose batches raise an error has failed.

    >>> model = Split(torch.nn.Identity(), torch.nn.Linear(2, 2))
    >>> ask = in_process(model, {"a": [(torch.randn(50, 2), torch.arange(50) % 2)]})
    >>> [(site, said.header.examples) for site, said in ask(unskew.Task(form="pooled"))]
    [('a', 50)]
    """
    expect("model", model, Split, "cut it first: split(module, example)")
    expect("data", data, Mapping, "give the batches of each site by its name, {name: batches}")
    sent: dict[str, Statistics] = {}

    def ask(request: Request) -> Iterator[tuple[str, Sent]]:
        for site in [site for site in data if site in (request.sites or data)]:
            said: Sent
            try:
                said = reply(request, model, data[site], sent.get(site))
            except UnskewError as error:
                said = error
            except Exception as error:  # what a site's batches can raise is no closed list
                said = Fault("failed", one_line(error))
            if isinstance(said, Statistics):
                sent[site] = said
            yield site, said

    return ask
