"""How long messages of a tensor-parallel group take on its own links, as the SMs show it step by step.

While ranks exchange messages hardly an SM holds a warp; while kernels run nearly all do. So what a step is
active without its SMs is launches, about the same in every step, and messages:

    y = active - SM-active = c + k t          t: what messages of the step's size and number usually take

Steps of different payload tell k from c: prompts of thousands of tokens against decodes of tens. The time
that neither the pipe nor DRAM explains would tell nothing: kernels that do not reach the peak make it grow
with the tokens as well, without any link. For t, what messages between the smallest and the largest take is
the mean of the table and of the line between its ends: a library that changes protocols, and a ring.

What k does not know: the few SMs that exchange messages are missed, tails of kernels are taken for messages,
and small messages are taken to be as much faster or slower as large ones.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuidle.agent.analysis.collectives import collectives_ns, line_ns
from gpuidle.agent.analysis.stepwork import Steps

Floats = NDArray[np.float64]

MEMORY_NS = 600e9
"""After this much time in steps what was learned has fallen to 1/e."""
FEWEST_STEPS = 10.0
"""Steps before anything is believed."""
DOUBT = 0.05
"""The largest standard error of k over k that is believed."""
FACTORS = (0.25, 4.0)
"""The table is of one kind of link and of one library: beyond these it says nothing of the node's."""


def at_most_unheld(talk_ns: float | None, active_ns: float | None, sm_ns: float | None) -> float | None:
    """Return the time of a window's messages, no more than the device was active without a warp on the SMs.

    That is a bound at any rate of sampling, and needs no steps: launches are in it as well. Where it is far
    below what messages take on any known link, SMs are held meanwhile, and it bounds nothing.
    """
    if talk_ns is None or active_ns is None or sm_ns is None:
        return talk_ns
    unheld_ns = active_ns - sm_ns
    return min(talk_ns, unheld_ns) if unheld_ns >= FACTORS[0] * talk_ns else talk_ns


def usual_ns(steps: Steps, tensor_parallel: int) -> Floats:
    """Return t: of each step the time of its messages on usual links, whose k is 1."""
    asked = (steps.work.collectives, steps.work.collective_bytes, tensor_parallel)
    mean = (np.asarray(collectives_ns(*asked)) + np.asarray(line_ns(*asked))) / 2
    return np.broadcast_to(mean, steps.start.shape)


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over steps, in ms: t is the usual time of a step's messages, y its active time without SMs."""

    count: float = 0.0
    t: float = 0.0
    y: float = 0.0
    tt: float = 0.0
    ty: float = 0.0
    yy: float = 0.0

    def learn(self, usual: Floats, unheld_ns: Floats, lasted_ns: float) -> LinkFit:
        """Return the fit with more steps, which lasted so long together; what is old fades."""
        fade = math.exp(-lasted_ns / MEMORY_NS)
        t, y = usual / 1e6, unheld_ns / 1e6
        return LinkFit(
            count=fade * self.count + len(t),
            t=fade * self.t + float(t.sum()),
            y=fade * self.y + float(y.sum()),
            tt=fade * self.tt + float(np.dot(t, t)),
            ty=fade * self.ty + float(np.dot(t, y)),
            yy=fade * self.yy + float(np.dot(y, y)),
        )

    def factor(self) -> tuple[float, float] | None:
        """Return k and its standard error; None where steps do not tell it, or links are of another kind.

        Launches take time: where the line would have them take less than none it goes through the origin.
        """
        if self.count < FEWEST_STEPS or self.t <= 0:
            return None
        mean_t, mean_y = self.t / self.count, self.y / self.count
        spread = self.tt - self.count * mean_t**2
        together = self.ty - self.count * mean_t * mean_y
        scatter = self.yy - self.count * mean_y**2
        if spread <= 1e-9 * self.tt:
            return None
        k = together / spread
        left = scatter - k * together
        error = math.sqrt(max(0.0, left) / (self.count - 2) / spread)
        if mean_y < k * mean_t:
            k = self.ty / self.tt
        if not FACTORS[0] <= k <= FACTORS[1] or error > DOUBT * k:
            return None
        return k, error


def steps_learned(
    fit: LinkFit, steps: Steps, until_ns: int, usual: Floats, unheld_ns: Floats | None
) -> LinkFit:
    """Return the fit with the steps that ended by `until_ns`, the end of their window: each is learned once.

    Args:
        fit: What was learned before.
        steps: Those that touch the window.
        until_ns: The window's end.
        usual: By step, what its messages usually take.
        unheld_ns: By step, how long it was active without a warp on the SMs; NaN where counters miss a part
            of it, None without counters: the fit stays as it is.
    """
    if unheld_ns is None:
        return fit
    ended = (steps.end <= until_ns) & np.isfinite(unheld_ns)
    return fit.learn(usual[ended], unheld_ns[ended], float((steps.end - steps.start)[ended].sum()))
