"""What quantization costs in accuracy (``kvpass eval``), and configurations chosen by it (``kvpass tune``)."""

from kvpass.accuracy.results import Evaluation
from kvpass.accuracy.retrieval import Retrieval
from kvpass.accuracy.teacher_forced import evaluate
from kvpass.accuracy.tuning import Tuning, tune

__all__ = ["Evaluation", "Retrieval", "Tuning", "evaluate", "tune"]
