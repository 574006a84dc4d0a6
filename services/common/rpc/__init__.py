"""gRPC between processes: channels, servers, bounded queues, and encodings of token ids."""

from pdserve.services.common.rpc.backpressure import Backpressure, SlowReaderError, deliver
from pdserve.services.common.rpc.blobs import (
    BLOB_CACHE_BYTES,
    BlobCache,
    BlobsServicer,
    blob_digest,
    read_blob,
)
from pdserve.services.common.rpc.channel import (
    AUTHORIZATION,
    CHANNEL_OPTIONS,
    MESSAGE_LIMITS,
    PROTOCOL_VERSION,
    IdsCollector,
    VersionGate,
    advertised,
    check_version,
    host_of,
    is_refusal,
    may_be_closed,
    send_ids,
)
from pdserve.services.common.rpc.malformed import Context, Guard, MalformedInterceptor, guarded
from pdserve.services.common.rpc.outbox import (
    NumberedChoice,
    Outbox,
    RowReader,
    TokenRow,
    TokensOutbox,
)
from pdserve.services.common.rpc.request_progress import LostTokens, RequestProgress, remaining_ms
