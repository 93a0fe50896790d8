"""The broker: verbs over one store, group commit, waiting claims, background work.

==============  ==================================================================
``broker``      :class:`Broker`: every verb, in the order of a message's life
``requests``    its base for a server: many requests done as one change of the store
``log``         its base for tailers and bulk readers: the verbs of the metadata log
``runner``      the lock, the time, waiting claims, the sweeper thread
``durability``  group commit: one ``fsync`` for many changes
``router``      ``route_once``: the log into the queues, without Spark
``reader``      the verbs that only look; a store that is read beside its owner
==============  ==================================================================
"""

from penstock.broker.broker import Broker

__all__ = ["Broker"]
