from dase_grpc.api import Began as Began
from dase_grpc.api import Ended as Ended
from dase_grpc.api import Evaluated as Evaluated
from dase_grpc.api import Event as Event
from dase_grpc.api import Kept as Kept
from dase_grpc.api import Run as Run
from dase_grpc.api import Stepped as Stepped
from dase_grpc.api import TrainedPolicy as TrainedPolicy
from dase_grpc.api import Updated as Updated
from dase_grpc.api import iterate as iterate
from dase_grpc.api import load as load
from dase_grpc.api import train as train
from dase_grpc.inference.client import PolicyClient as PolicyClient
from dase_grpc.replay.client.session import Session as Session

__all__: list[str]
__version__: str
