"""Record a real run of a model as a torch.fx graph."""

from fractrain_fx.capture.batch import batch_size, resize_batch
from fractrain_fx.capture.call import CallSpec
from fractrain_fx.capture.cleanup import changes_operands
from fractrain_fx.capture.guard_check import Form, forms_of, shapes_of
from fractrain_fx.capture.guards import Guard
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.record import Recording, record

__all__ = [
    "CallSpec",
    "Form",
    "Guard",
    "RecordedModule",
    "Recording",
    "batch_size",
    "changes_operands",
    "forms_of",
    "record",
    "resize_batch",
    "shapes_of",
]
