"""Plans: which rank holds which stage, and every send and receive of a step."""

from ppdsl.plan.laws import verify_schedule
from ppdsl.plan.lifetimes import Peak, peak_activations
from ppdsl.plan.lowering import lower
from ppdsl.plan.messages import Compute, Direction, Free, Message, MessagePlan, Recv, Send, Step, Wait
from ppdsl.plan.placement import place
from ppdsl.plan.rendezvous import rendezvous
from ppdsl.plan.verify import verify_plan

__all__ = [
    "Compute",
    "Direction",
    "Free",
    "Message",
    "MessagePlan",
    "Peak",
    "Recv",
    "Send",
    "Step",
    "Wait",
    "lower",
    "peak_activations",
    "place",
    "rendezvous",
    "verify_plan",
    "verify_schedule",
]
