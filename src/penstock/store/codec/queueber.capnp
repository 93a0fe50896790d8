@0xb7d29f6c1e5a4083;
# Queueber's records. StoredItem is what the importer reads from Queueber's databases; Penstock's own
# has another layout (records.py). LeaseEntry is also what Penstock writes, with fields of its own at
# the end.
#
# Cap'n Proto's rule of evolution is the upgrade recipe of LeaseEntry: a field is only ever added, with
# the next free number. A record that Queueber wrote has a smaller data section and fewer pointers;
# the missing fields read as 0 or empty. Nothing is renumbered or removed.

struct StoredItem {
  contents @0 :Data;
  visibilityTsIndexKey @1 :Data;
  id @2 :Data;
}

struct LeaseEntry {
  ids @0 :List(Data);                # sorted
  expiryTsSecs @1 :UInt64;           # expiryTsMs, rounded up
  expiryTsIndexKey @2 :Data;

  # From here on: Penstock's.
  expiryTsMs @3 :UInt64;
  claimedAtMs @4 :UInt64;
  queue @5 :UInt32;                  # number of the queue, as its spec has it
  consumer @6 :Text;
}
