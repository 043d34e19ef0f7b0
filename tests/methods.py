"""Methods for the tests: those of the package, and odd ones that use every part of `Algorithm`.

The odd ones are sketches of methods to come (control variates, a contrastive penalty, heads that stay at home, parts
that learn in turns). They are here to show that the interface is fit for its purpose: that the engines agree on all
of it.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from unskew.algorithms import fedavg, fedavgm, fedprox, proximal, server
from unskew.models import body, head
from unskew.optim import momentum
from unskew.tree import add, each, prefix, scale, sub, under, zeros


def control_variates(population=3):
    """SCAFFOLD, option II: server state that is sent, client memory, corrected gradients."""
    base = fedavg()

    def correct(grads, params, context):
        known = {k: g - context.memory[k] + context.state[k] for k, g in grads.items() if k in context.memory}
        return {**grads, **known}

    def report(params, context, work):
        upload, _ = base.report(params, context, work)
        delta = sub(params, context.start)
        mine = {
            k: context.memory[k] - context.state[k] - d / (work.steps[k].clamp(min=1) * work.lr)
            for k, d in delta.items()
        }
        return {**upload, **prefix("control", sub(mine, context.memory))}, mine

    def update(params, state, total):
        params, _ = base.update(params, state, total)
        return params, add(state, scale(under("control", total), 1 / population))

    return replace(
        base, init=zeros, enroll=lambda params, model: zeros(params), correct=correct, report=report, update=update,
        sent=lambda name: True,
    )  # fmt: skip


def contrastive(mu=1.0, tau=0.5):
    """MOON: a penalty with two more forward passes, and a whole model (running statistics too) as memory."""
    base = fedavg()

    def penalty(net, params, batch, output, context):
        anchors = [net(tree, batch.x, train=False).features for tree in (context.start, context.memory)]
        similarity = torch.stack([F.cosine_similarity(output.features, z) for z in anchors], 1) / tau
        return mu * F.cross_entropy(similarity, torch.zeros_like(batch.y))

    def report(params, context, work):
        return base.report(params, context, work)[0], work.model

    return replace(base, enroll=lambda params, model: model, penalty=penalty, report=report)


def squared_error(base):
    def criterion(logits, labels):
        return ((logits - (labels[:, None] == torch.arange(logits.shape[1])).to(logits)) ** 2).mean()

    return replace(base, criterion=criterion)


def frozen_head(base):
    return replace(base, frozen=head)


def keep_local(base, mine):
    return replace(base, shared=lambda name: base.shared(name) and not mine(name))


def alternating(base, share=0.5):
    def trained(name, progress):
        first = (progress < share).to(progress)
        return first if head(name) else 1 - first

    return replace(base, trained=trained)


def momentum_of_absolutes(beta=0.5):
    """A server optimiser with two kinds of state."""
    rule = momentum(beta)

    def init(params):
        return {**prefix("v", rule.init(params)), **prefix("a", zeros(params))}

    def update(delta, state):
        step, v = rule.update(delta, under("v", state))
        a = each(lambda old, d: old + d.abs(), under("a", state), delta)
        return step, {**prefix("v", v), **prefix("a", a)}

    return rule._replace(init=init, update=update)


PRODUCT = {"fedavg": fedavg(), "fedavg-equal": fedavg("equal"), "fedprox": fedprox(0.1), "fedavgm": fedavgm(0.5),
           "clsprox": proximal(fedavg(), 0.1, only=head), "fedprox-m": server(fedprox(0.1), momentum(0.3))}  # fmt: skip

ODD = {
    "control variates": control_variates(),
    "contrastive": contrastive(),
    "squared error": squared_error(fedavg()),
    "frozen head": frozen_head(fedavg()),
    "body at home": keep_local(fedavg(), body),
    "head at home, in turns": alternating(keep_local(fedavg(), head)),
    "contrastive, body at home": keep_local(contrastive(), body),
    "control variates, head at home, in turns": alternating(keep_local(control_variates(), head)),
    "control variates, server": server(control_variates(), momentum_of_absolutes()),
    "proximal contrastive, frozen head": frozen_head(proximal(contrastive(), 0.1)),
}
