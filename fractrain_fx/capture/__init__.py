"""Record a real run of a model as a torch.fx graph."""

from fractrain_fx.capture.batch import batch_size, resize_batch
from fractrain_fx.capture.call import CallSpec
from fractrain_fx.capture.cleanup import changes_operands
from fractrain_fx.capture.module import RecordedModule
from fractrain_fx.capture.record import Recording, record

__all__ = ["CallSpec", "RecordedModule", "Recording", "batch_size", "changes_operands", "record", "resize_batch"]
