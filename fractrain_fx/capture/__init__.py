"""Record a real run of a model as a torch.fx graph."""

from fractrain_fx.capture.asked import PartMode, Read, ReadCircumstance
from fractrain_fx.capture.checking.guard_check import Form, forms_of, shapes_of
from fractrain_fx.capture.inputs.batch import batch_size, call_of, resize_batch
from fractrain_fx.capture.inputs.call import CallSpec
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.record import Recording, record
from fractrain_fx.capture.recording.cleanup import changes_operands
from fractrain_fx.capture.recording.constants import WRITTEN, TensorWrite
from fractrain_fx.capture.recording.memory import memory_in, put_first
from fractrain_fx.capture.recording.writer import ORDER, PLACE
from fractrain_fx.capture.sizes.guards import Guard, InputValues
from fractrain_fx.capture.surroundings import Surroundings

__all__ = [
    "ORDER",
    "PLACE",
    "WRITTEN",
    "CallSpec",
    "Form",
    "Guard",
    "InputValues",
    "PartMode",
    "Read",
    "ReadCircumstance",
    "RecordedModule",
    "Recording",
    "Surroundings",
    "TensorWrite",
    "batch_size",
    "call_of",
    "changes_operands",
    "forms_of",
    "memory_in",
    "put_first",
    "record",
    "resize_batch",
    "shapes_of",
]
