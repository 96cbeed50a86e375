"""The live aggregate: a Faust stream over the run's topics, applied to one `RunView`.

Why Faust here: what the page shows is derived from the log, may be lost at any time and is rebuilt
from the first record at every start. That is a plain stream, without tables, commits or a
changelog. Services whose state matters use the shell instead. So does the launcher's report, which
must hold exactly what was committed: Faust reads uncommitted, so a record of an aborted
transaction may show here for a moment.
"""

import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import faust
import msgspec

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError
from forgemq_bus.kafka import KafkaConnection
from forgemq_bus.kept_records import message_of
from forgemq_bus.log import Record
from forgemq_bus.names import broker_topic, contract_topic
from forgemq_bus.payloads import fetched
from forgemq_run_view.view import TOPICS, RunView

Bad = Callable[[str], None]
FETCH_BYTES_MAX = 8 * 2**20
"""At most one record of the largest size that a topic takes, from each partition."""


def stream_app(
    connection: KafkaConnection,
    *,
    run: str,
    start_id: str,
    view: RunView,
    blobs: BlobStore,
    datadir: Path,
    on_bad: Bad,
) -> faust.App:
    """A Faust app whose one agent applies every record of the run to the view.

    Args:
        connection: The broker, with its security.
        run: Id of the run.
        start_id: Different for every start of the console. A consumer group that has no positions
            reads from the first record.
        view: The aggregate that every record is applied to.
        blobs: The run's blob store.
        datadir: Folder that Faust makes for tables; a temporary one, since there are none.
        on_bad: Gets one line about each record that does not decode, or whose value lies in a blob
            store that cannot be reached; the record is skipped.
    """
    app = faust.App(
        f"{run}.console-{start_id}",
        broker=";".join(f"kafka://{each.strip()}" for each in connection.bootstrap.split(",")),
        broker_credentials=_credentials(connection),
        store="memory://",
        datadir=str(datadir),
        autodiscover=False,
        web_enabled=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=FETCH_BYTES_MAX,
        stream_wait_empty=False,
        key_serializer="raw",
        value_serializer="raw",
    )
    source = app.topic(
        *(broker_topic(topic.name, run=run) for topic in TOPICS), key_type=bytes, value_type=bytes
    )

    async def apply(stream: faust.Stream) -> None:
        async for event in stream.events():
            record = _record(event.message, run=run)
            try:
                view.apply(message_of((await fetched([record], blobs=blobs))[0]))
            except (msgspec.MsgspecError, BlobError) as error:
                on_bad(f"{record.where}: {error}")

    app.agent(source, name="run-view")(apply)
    return app


def _record(message: faust.types.Message, *, run: str) -> Record:
    return Record(
        topic=contract_topic(message.topic, run=run),
        partition=message.partition,
        offset=message.offset,
        timestamp_ms=int(message.timestamp * 1000),
        key=message.key or b"",
        value=message.value or b"",
        headers=_headers(message.headers),
    )


def _headers(headers: object) -> tuple[tuple[str, bytes], ...]:
    # Which of the two Faust passes on depends on the version of its driver.
    pairs = headers.items() if isinstance(headers, Mapping) else headers or ()
    return tuple((str(name), bytes(value)) for name, value in pairs)  # type: ignore[attr-defined]


def _credentials(
    connection: KafkaConnection,
) -> faust.SASLCredentials | faust.SSLCredentials | None:
    context = (
        ssl.create_default_context(cafile=connection.tls_ca_file or None)
        if connection.security_protocol.endswith("SSL")
        else None
    )
    if connection.security_protocol.startswith("SASL"):
        return faust.SASLCredentials(
            mechanism=connection.sasl_mechanism,
            username=connection.sasl_username,
            password=connection.sasl_password,
            ssl_context=context,
        )
    return faust.SSLCredentials(context=context) if context is not None else None
