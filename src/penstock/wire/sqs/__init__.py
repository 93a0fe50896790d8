"""The SQS wire protocol, pure: no sockets, brokers or clocks.

``protocol`` turns bytes into requests of the 23 operations, and answers and faults into bytes;
``messages`` and ``queues`` map them to Penstock's nouns; ``signature`` checks signatures.
"""
