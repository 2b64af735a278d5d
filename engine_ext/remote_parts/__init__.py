"""Parts on hosts that have no spool: fetched once per host, and kept for its ranks.

The server's process spools a part on one host. Ranks on other hosts get it by its content hash:
`fetch` reads it over HTTP from the source in the operation, and `cache` keeps it in a folder that
all ranks and engines of a host share. Other rooms link to its files in a `local_folder`. `peers`
are other engines, which are asked before the store of a log is.

Imports: `engine_ext.ranks`, `engine_ext.files`, `engine_ext.settings`, `engine_ext.errors`.
"""

from engine_ext.remote_parts.cache import PartCache
from engine_ext.remote_parts.local_folder import LocalFolder
from engine_ext.remote_parts.locate import Locate, locate_part, locator
from engine_ext.remote_parts.peers import ROUTE, Peers

__all__ = ["ROUTE", "LocalFolder", "Locate", "PartCache", "Peers", "locate_part", "locator"]
