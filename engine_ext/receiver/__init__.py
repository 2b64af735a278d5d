"""One rank's receiver: the state machine behind the endpoints.

`receiver` carries out what the HTTP side asks for, with `sync_operations` for all that writes;
`sync_state` decides which parts are admitted, `background_staging` stages them in threads and
`shared_decoding` decodes each once per host, `lease` keeps HTTP processes apart, `startup` makes a
receiver of a `loaded_model`, and `adapter_receivers` those of LoRA adapters.

Imports: `engine_ext.apply` and the rooms below it. Never an engine, never the HTTP side.
"""

from engine_ext.receiver.adapter_receivers import AdapterReceivers, AdapterStore, AdapterStores
from engine_ext.receiver.background_staging import BackgroundStaging
from engine_ext.receiver.loaded_model import LoadedModel, Rebuilding
from engine_ext.receiver.receiver import Receiver
from engine_ext.receiver.startup import make_receiver

__all__ = [
    "AdapterReceivers",
    "AdapterStore",
    "AdapterStores",
    "BackgroundStaging",
    "LoadedModel",
    "Rebuilding",
    "Receiver",
    "make_receiver",
]
