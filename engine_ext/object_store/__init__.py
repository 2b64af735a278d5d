"""Objects in a store (S3, Google Cloud Storage, Azure), by URL.

`urls` says what is one, `store` reads and writes objects. The client is obstore, which is needed
only where a URL is named; credentials and endpoints come from its own environment variables and
configuration.

Imports: `engine_ext.resources`.
"""

from engine_ext.object_store.store import STREAMS, ObjectFacts, ObjectStore
from engine_ext.object_store.urls import is_store_url, is_within, store_url

__all__ = ["STREAMS", "ObjectFacts", "ObjectStore", "is_store_url", "is_within", "store_url"]
