"""Modified methods under the papers' names. Each modifies `base`, which is FedAvg unless you give another:
fedprox(0.1, fednova()).
"""

from __future__ import annotations

from unskew.methods.algorithm import Algorithm
from unskew.methods.bases import fedavg
from unskew.methods.modifications import alternating, frozen_head, keep_local, proximal, server
from unskew.methods.optim import adagrad, adam, momentum, yogi
from unskew.models.networks import in_classifier, in_features


def fedprox(mu: float = 0.01, base: Algorithm | None = None) -> Algorithm:
    """FedProx: a proximal term mu/2 ||w - w_start||^2 on all tensors: `proximal(base, mu)`.
    >>> unskew.fedprox(mu=0.1, base=unskew.fednova()).numbers
    {'proximal': 0.1}
    """
    return proximal(base or fedavg(), mu)


def clsprox(mu: float = 0.01, base: Algorithm | None = None) -> Algorithm:
    """The proximal term on the classifier alone: `proximal(base, mu, only=in_classifier)`.
    >>> unskew.clsprox(mu=0.1).numbers
    {'proximal': 0.1}
    """
    return proximal(base or fedavg(), mu, only=in_classifier)


def fedavgm(beta: float = 0.1, base: Algorithm | None = None) -> Algorithm:
    """FedAvgM, momentum on the server: `server(base, momentum(beta))`; CCVR 5.1 uses 0.1.
    >>> from unskew.methods.algorithm import Population
    >>> unskew.fedavgm(beta=0.1).init({"w": torch.zeros(1)}, Population(2, 10))
    {'server/w': tensor([0.])}
    """
    return server(base or fedavg(), momentum(beta))


def fedopt(lr: float = 1.0, beta: float = 0.3, base: Algorithm | None = None) -> Algorithm:
    """FedOpt, SGD on the server: `server(base, momentum(beta, lr))`; SphereFed's Table 16 uses 1.0 and 0.3.
    >>> from unskew.methods.algorithm import Population
    >>> unskew.fedopt(lr=0.5).init({"w": torch.zeros(1)}, Population(2, 10))
    {'server/w': tensor([0.])}
    """
    return server(base or fedavg(), momentum(beta, lr))


def fedadam(
    lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3, base: Algorithm | None = None
) -> Algorithm:
    """FedAdam, Adam on the server: `server(base, adam(...))`.
    >>> from unskew.methods.algorithm import Population
    >>> list(unskew.fedadam().init({"w": torch.zeros(1)}, Population(2, 10)))
    ['server/m/w', 'server/v/w']
    """
    return server(base or fedavg(), adam(lr, b1, b2, eps))


def fedyogi(
    lr: float = 0.01, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-3, base: Algorithm | None = None
) -> Algorithm:
    """FedYogi, Yogi on the server: `server(base, yogi(...))`.
    >>> from unskew.methods.algorithm import Population
    >>> list(unskew.fedyogi(base=unskew.scaffold()).init({"w": torch.zeros(1)}, Population(2, 10)))
    ['control/w', 'weight', 'server/m/w', 'server/v/w']
    """
    return server(base or fedavg(), yogi(lr, b1, b2, eps))


def fedadagrad(lr: float = 0.01, b1: float = 0.0, eps: float = 1e-3, base: Algorithm | None = None) -> Algorithm:
    """FedAdagrad, Adagrad on the server: `server(base, adagrad(...))`.
    >>> from unskew.methods.algorithm import Population
    >>> list(unskew.fedadagrad().init({"w": torch.zeros(1)}, Population(2, 10)))
    ['server/m/w', 'server/v/w']
    """
    return server(base or fedavg(), adagrad(lr, b1, eps))


def fedbabu(base: Algorithm | None = None) -> Algorithm:
    """FedBABU (Oh et al. 2022): `frozen_head(base)`; personal models fine-tune the head afterwards.
    >>> unskew.fedbabu().frozen("classifier.weight")
    True
    """
    return frozen_head(base or fedavg())


def lg_fedavg(base: Algorithm | None = None) -> Algorithm:
    """LG-FedAvg (Liang et al. 2020), the features stay with each client: `keep_local(base, in_features)`.
    >>> [unskew.lg_fedavg().shared(name) for name in ("features.0.weight", "classifier.weight")]
    [False, True]
    """
    return keep_local(base or fedavg(), in_features)


def fedrep(share: float = 0.5, base: Algorithm | None = None) -> Algorithm:
    """FedRep (Collins et al. 2021), the head stays with each client and learns before the features:
    `alternating(keep_local(base, in_classifier), share)`.
    >>> [unskew.fedrep().shared(name) for name in ("features.0.weight", "classifier.weight")]
    [True, False]
    """
    return alternating(keep_local(base or fedavg(), in_classifier), share)
