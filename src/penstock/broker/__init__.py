"""The broker: verbs over one store, group commit, waiting claims, background work.

==============  ==================================================================
``broker``      :class:`Broker`: every verb, in the order of a message's life
``verbs``       its bases: verbs that only look, of the metadata log, for a server
``settings``    checks of a queue's settings
``router``      routing by filters
``runner``      the lock, the time, waiting claims, the sweeper thread
``durability``  group commit: one ``fsync`` for many changes
``requests``    many requests as one change of the store; loaded by servers
``reader``      a store that is read beside its owner
``tailer``      routing of the log without Spark
``explain``     why a message is, or is not, in a queue
``metrics``     counts and latencies of the verbs, once a program asks for them
==============  ==================================================================
"""

from penstock.broker.broker import Broker

__all__ = ["Broker"]
