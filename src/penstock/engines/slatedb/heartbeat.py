"""Watching the owner of a SlateDB database, without asking or disturbing it.

Every write of an owner is one more object of its log, numbered without gaps, and an owner with
nothing to do writes one all the same now and then. So the number of the last object is a pulse: it
goes up for as long as somebody owns the database. Nothing is written here, and no object is read:
whether one is there is all that is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from slatedb.uniffi import AdminBuilder, Error, SlateDbWalReader

from penstock.engines.slatedb.binding import CallTimeout, call
from penstock.engines.slatedb.location import NO_DATABASE, translate_open

if TYPE_CHECKING:
    from penstock.engines.slatedb.location import Place

__all__ = ["Pulse"]

# A store that takes longer says nothing about the owner.
_ANSWER_S: Final = 10.0


class Pulse:
    """The number of the last object of the log of a database, as of each look."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._store = place.store()
        self._last = 0

    def look(self) -> int:
        """Return the number now; 0 if there is no database yet. About ten HEAD requests."""
        try:
            self._last = self._tail(self._last or self._kept())
        except Error.Data as error:
            if NO_DATABASE not in error.message:
                translate_open(error, self.place)
        except (Error, CallTimeout) as error:
            translate_open(error, self.place)
        return self._last

    def look_again(self) -> int:
        """Return the number now, as one who has never looked before would find it.

        The objects that come after the last one seen may have been thrown away meanwhile, if it was
        long ago.
        """
        before, self._last = self._last, 0
        self._last = max(before, self.look())
        return self._last

    def _kept(self) -> int:
        """Return the number after which no object of the log has been thrown away."""
        admin = AdminBuilder(self.place.path, self._store).build()
        manifest = call(admin.read_manifest(None), _ANSWER_S)
        return 0 if manifest is None else manifest.replay_after_wal_id

    def _tail(self, after: int) -> int:
        reader = SlateDbWalReader(self.place.path, self._store)
        last: int = call(reader.last_wal_file_id(after), _ANSWER_S)
        return last
