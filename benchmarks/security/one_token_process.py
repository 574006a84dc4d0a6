"""A decode worker of line 7 without an engine, with the files of a tiny model: joins every router
of a name, until it is stopped.

`python one_token_process.py NAME:PORT --cluster-ca FILE --cluster-cert FILE --cluster-key FILE`
"""

import argparse
import asyncio
import signal

from fakes.one_token_worker import OneTokenWorker
from fakes.router import served

from pdserve.engine.kv.codec import encode_spec
from pdserve.engine.kv.spec import KvSpec
from pdserve.protos.common_pb2_grpc import add_BlobsServicer_to_server
from pdserve.services.host.auth.tls import TlsAccess
from pdserve.services.host.rpc.blobs import BlobCache, BlobService

BLOCK_SIZE = 16


async def run(routers: str, access: TlsAccess) -> None:
    card, files = served()
    card.kv_spec = encode_spec(KvSpec(BLOCK_SIZE, ()))
    blobs = BlobCache()
    for data in files.values():
        blobs.add(data)
    worker = OneTokenWorker([routers], access, card)
    add_BlobsServicer_to_server(BlobService(blobs.get), worker.host.server)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await worker.start()
    await stop.wait()
    await worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("routers")
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--cluster-{name}", required=True)
    args = parser.parse_args()
    access = TlsAccess(args.cluster_ca, args.cluster_cert, args.cluster_key)
    asyncio.run(run(args.routers, access))


if __name__ == "__main__":
    main()
