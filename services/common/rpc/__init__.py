"""gRPC between processes: channels, servers, bounded queues, and the encoding of tokens."""

from pdserve.services.common.rpc.backpressure import Backpressure, SlowReaderError, deliver
from pdserve.services.common.rpc.blobs import (
    BLOB_CACHE_BYTES,
    BlobCache,
    BlobService,
    blob_digest,
    read_blob,
)
from pdserve.services.common.rpc.channel import (
    AUTHORIZATION,
    CHANNEL_OPTIONS,
    LIMITS,
    advertised,
    may_be_closed,
)
from pdserve.services.common.rpc.fragments import IdsCollector, send_ids
from pdserve.services.common.rpc.malformed import Context, Guard, MalformedInterceptor, guarded
from pdserve.services.common.rpc.outbox import Outbox, TokensOutbox
from pdserve.services.common.rpc.protocol_version import (
    PROTOCOL_VERSION,
    VersionGate,
    check_version,
    host_of,
    is_refusal,
)
from pdserve.services.common.rpc.request_progress import LostTokens, RequestProgress, remaining_ms
from pdserve.services.common.rpc.token_rows import NumberedChoice, RowReader, TokenRow
