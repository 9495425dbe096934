"""`serve`: where the dashboard listens. The server itself is the face `trainpace.web`."""

from typing import Annotated

from trainpace.core.units import parse_count
from trainpace.verbs.places import HardwareFile, JournalPlace
from trainpace.verbs.request import Field, Request, within


class ServeRequest(Request):
    host: Annotated[str, Field("The address to listen on; any but loopback needs a token.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Field("0 takes a free one.", within("port", 0, 65535, parse_count))] = 8765
    name: Annotated[
        tuple[str, ...], Field("Another name (DNS) that this server is called by; needs a token.")
    ] = ()
    with_token: Annotated[
        bool, Field("Ask for a token on loopback too, where other people use this machine.")
    ] = False
    journal: JournalPlace = None
    hardware: HardwareFile = None
