from paceline.errors import AuthenticationError as AuthenticationError
from paceline.errors import CollectiveError as CollectiveError
from paceline.errors import CollectiveMismatchError as CollectiveMismatchError
from paceline.errors import CollectiveTimeoutError as CollectiveTimeoutError
from paceline.errors import PacelineError as PacelineError
from paceline.errors import PeerLostError as PeerLostError
from paceline.errors import RendezvousError as RendezvousError
from paceline.errors import RendezvousTimeoutError as RendezvousTimeoutError
from paceline.errors import StoreConnectionError as StoreConnectionError
from paceline.errors import StoreError as StoreError
from paceline.errors import StoreTimeoutError as StoreTimeoutError
from paceline.errors import WorkerError as WorkerError

__version__: str
