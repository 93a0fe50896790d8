@0xbab6e22de0402699;
# The interface that Queueber's clients call. A call names the interface by a number that is made
# of the file's number and the interface's name, so both must be what Queueber's are; the same
# goes for the order of methods, and for the order and types of fields.

struct Item {
  contents @0 :Data;
  visibilityTimeoutSecs @1 :UInt64;   # a delay
}

struct PolledItem {
  contents @0 :Data;
  id @1 :Data;
}

struct AddRequest {
  items @0 :List(Item);
}

struct AddResponse {
  ids @0 :List(Data);
}

struct RemoveRequest {
  id @0 :Data;
  lease @1 :Data;
}

struct RemoveResponse {
  removed @0 :Bool;
}

struct PollRequest {
  leaseValiditySecs @0 :UInt64;
  numItems @1 :UInt32;                # 0: one
  timeoutSecs @2 :UInt64;             # 0: for ever
}

struct PollResponse {
  items @0 :List(PolledItem);
  lease @1 :Data;                     # empty if there are no items
}

struct ExtendRequest {
  lease @0 :Data;
  leaseValiditySecs @1 :UInt64;
}

struct ExtendResponse {
  extended @0 :Bool;
}

interface Queue {
  add @0 (req :AddRequest) -> (resp :AddResponse);
  remove @1 (req :RemoveRequest) -> (resp :RemoveResponse);
  poll @2 (req :PollRequest) -> (resp :PollResponse);
  extend @3 (req :ExtendRequest) -> (resp :ExtendResponse);
}
