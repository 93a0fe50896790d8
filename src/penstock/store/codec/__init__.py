"""Keys and records, byte for byte. Bytes in, bytes out: no I/O, no clock.

==================  ==========================================================================
module              what it owns
==================  ==========================================================================
``encodings``       the building blocks: terminated bytes, Utf8, VarBytes, var_u64, SeqBlock
``opendata``        ids and keys of the OpenData-Queue records
``records``         values of the OpenData-Queue records (version 1 in ``records_v1``)
``log``             keys and values of the OpenData-Log, which is the metadata log
``queueber``        keys of a Queueber database
``queueber.capnp``  schema of Queueber's records, with our fields added
``stored``          our two Cap'n Proto records, hand-made for speed
``metadata``        the opaque metadata bytes of a message
==================  ==========================================================================

Every decoder raises :class:`~penstock.errors.CorruptRecord` and nothing else for bytes that it
can't read; what it accepts, its encoder writes back unchanged.
"""
