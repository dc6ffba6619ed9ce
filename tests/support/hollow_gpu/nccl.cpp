// NCCL between processes of one host, over sockets.  What is asked for is put into its stream, and
// runs there when the stream comes to it, as long as it takes.  As NCCL does, two ranks connect
// when one of them first sends or receives, and all of a group at its first collective: the host is
// held until the other end has come to the same.  Sums are those of all ranks in their order.
// HOLLOW_ROOM: so many launches are under way at once; they start in the host's order, whatever
// their streams.  HOLLOW_COMMUNICATOR_MIB: what each takes of the device's memory.

#include <nccl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

using Task = std::function<void()>;

extern "C" void hollow_put(cudaStream_t stream, Task* task);
extern "C" void hollow_without_python(Task* task);
extern "C" bool hollow_take(long size);

namespace {

// Sockets of two ranks: what is sent; who connects to send to the higher rank, or to the lower.
enum Line { DATA, UPWARD, DOWNWARD, LINES };

struct Comm {
  std::string id;
  int size, rank;
  std::map<std::pair<int, int>, int> out, in;  // line and rank -> socket
  std::set<std::pair<bool, int>> connected;    // sends, rank
  int splits = 0;
  bool is_connected = false;
};

struct Message {
  bool sends;
  Comm* comm;
  char* bytes;
  size_t size;
  int rank;
  cudaStream_t stream;
};

struct Collective {
  Comm* comm;
  cudaStream_t stream;
  Task task;
};

thread_local int depth = 0;
thread_local std::vector<Message> messages;
thread_local std::vector<Collective> collectives;
thread_local std::vector<Task> joins;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "NCCL of a hollow GPU: %s\n", what);
  _exit(98);
}

void move(int socket, void* bytes, size_t size, bool sends) {
  for (char* at = (char*)bytes; size;) {
    ssize_t moved = sends ? write(socket, at, size) : read(socket, at, size);
    if (moved <= 0) fail("another rank is gone");
    at += moved, size -= moved;
  }
}

void together(const std::vector<Task>& tasks) {
  std::vector<std::thread> threads(tasks.begin(), tasks.end());
  for (auto& thread : threads) thread.join();
}

int number(const char* name) { return std::atoi(std::getenv(name) ?: "0"); }

// Puts a launch into its stream, to start when all before it have, and there is room.
void launch(cudaStream_t stream, Task task) {
  static const int room = number("HOLLOW_ROOM");
  static std::mutex mutex;
  static std::condition_variable changed;
  static long launches = 0, started = 0, under_way = 0;
  if (!room) return hollow_put(stream, new Task(task));
  hollow_put(stream, new Task([task, turn = launches++] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return started == turn && under_way < room; });
    started++, under_way++;
    changed.notify_all();
    lock.unlock();
    task();
    lock.lock();
    under_way--;
    changed.notify_all();
  }));
}

void join(Comm* comm) {
  if (!hollow_take((long)number("HOLLOW_COMMUNICATOR_MIB") << 20)) fail("out of memory");
  auto address = [&](int rank) {
    sockaddr_un made{AF_UNIX, {}};
    std::snprintf(made.sun_path, sizeof made.sun_path, "%s.%d", comm->id.c_str(), rank);
    return made;
  };
  sockaddr_un own = address(comm->rank);
  int door = socket(AF_UNIX, SOCK_STREAM, 0);
  if (bind(door, (sockaddr*)&own, sizeof own) || listen(door, 64)) fail("a socket is taken");
  std::thread others([&] {
    for (int left = LINES * (comm->size - 1); left; left--) {
      int socket = accept(door, nullptr, nullptr), from[2];
      move(socket, from, sizeof from, false);
      comm->in[{from[0], from[1]}] = socket;
    }
  });
  for (int rank = 0; rank < comm->size; rank++) {
    for (int line = 0; rank != comm->rank && line < LINES; line++) {
      sockaddr_un other = address(rank);
      int made;
      for (;; usleep(1000)) {
        made = socket(AF_UNIX, SOCK_STREAM, 0);
        if (!connect(made, (sockaddr*)&other, sizeof other)) break;
        close(made);
      }
      int from[2] = {line, comm->rank};
      move(made, from, sizeof from, true);
      comm->out[{line, rank}] = made;
    }
  }
  others.join();
  close(door);
  unlink(own.sun_path);
}

// A byte each way, for a connection of these two in this direction.
void meet(Comm* comm, int rank, Line line) {
  char byte = 0;
  move(comm->out[{line, rank}], &byte, 1, true);
  move(comm->in[{line, rank}], &byte, 1, false);
}

void connect(Comm* comm) {
  if (comm->is_connected) return;
  comm->is_connected = true;
  for (int rank = 0; rank < comm->size; rank++)
    if (rank != comm->rank) meet(comm, rank, UPWARD);
}

// Messages of one group among the same ranks, at the same time; those of one pair in their order.
void exchange(const std::vector<Message>& group) {
  std::map<std::pair<bool, int>, std::vector<Message>> ways;
  for (const Message& one : group) ways[{one.sends, one.rank}].push_back(one);
  std::vector<Task> tasks;
  for (auto& [way, line] : ways) {
    auto [sends, rank] = way;
    Comm* comm = line[0].comm;
    if (rank != comm->rank) {
      tasks.push_back([&line, comm, sends = sends, rank = rank] {
        int socket = sends ? comm->out[{DATA, rank}] : comm->in[{DATA, rank}];
        for (const Message& one : line) move(socket, one.bytes, one.size, sends);
      });
    } else if (sends) {
      auto& back = ways[{false, rank}];
      for (size_t k = 0; k < line.size(); k++)
        std::memcpy(back[k].bytes, line[k].bytes, line[k].size);
    }
  }
  together(tasks);
}

// The same number of bytes of each rank, one behind the other.
void gather(Comm* comm, const char* own, char* whole, size_t size) {
  std::vector<Message> group;
  for (int rank = 0; rank < comm->size; rank++) {
    if (rank == comm->rank) continue;
    group.push_back({true, comm, (char*)own, size, rank});
    group.push_back({false, comm, whole + rank * size, size, rank});
  }
  exchange(group);
  std::memmove(whole + comm->rank * size, own, size);
}

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

struct Narrow {  // bf16
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  Narrow(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bits = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
};

template <class T, class Wide>
void reduce_as(const char* whole, char* made, size_t count, int ranks, ncclRedOp_t op) {
  for (size_t k = 0; k < count; k++) {
    Wide found = ((const T*)whole)[k];
    for (int rank = 1; rank < ranks; rank++) {
      Wide other = ((const T*)whole)[rank * count + k];
      found = op == ncclMax   ? std::max(found, other)
              : op == ncclMin ? std::min(found, other)
                              : found + other;
    }
    ((T*)made)[k] = T(op == ncclAvg ? found / ranks : found);
  }
}

void reduce(const char* whole, char* made, size_t count, int ranks, ncclDataType_t type,
            ncclRedOp_t op) {
  switch (type) {
    case ncclInt8:
      return reduce_as<int8_t, int>(whole, made, count, ranks, op);
    case ncclUint8:
      return reduce_as<uint8_t, int>(whole, made, count, ranks, op);
    case ncclInt32:
      return reduce_as<int32_t, int32_t>(whole, made, count, ranks, op);
    case ncclInt64:
      return reduce_as<int64_t, int64_t>(whole, made, count, ranks, op);
    case ncclFloat16:
      return reduce_as<_Float16, float>(whole, made, count, ranks, op);
    case ncclBfloat16:
      return reduce_as<Narrow, float>(whole, made, count, ranks, op);
    case ncclFloat32:
      return reduce_as<float, float>(whole, made, count, ranks, op);
    case ncclFloat64:
      return reduce_as<double, double>(whole, made, count, ranks, op);
    default:
      fail("a dtype that it does not know");
  }
}

// The end of a group: what it holds is put into streams.
void end() {
  if (depth) return;
  auto now = std::move(messages);
  auto whole = std::move(collectives);
  auto first = std::move(joins);
  messages.clear(), collectives.clear(), joins.clear();
  // All ends of a group are there at once: a rank that sends and receives waits for both.
  Task beside = [&] {
    together(first);
    for (auto& one : whole) connect(one.comm);
    std::vector<Task> tasks;
    for (auto& one : now) {
      bool is_new =
          one.rank != one.comm->rank && one.comm->connected.insert({one.sends, one.rank}).second;
      Line line = one.sends == (one.comm->rank < one.rank) ? UPWARD : DOWNWARD;
      if (is_new) tasks.push_back([&one, line] { meet(one.comm, one.rank, line); });
    }
    together(tasks);
  };
  hollow_without_python(&beside);
  for (auto& one : whole) launch(one.stream, one.task);
  std::map<std::pair<cudaStream_t, Comm*>, std::vector<Message>> groups;
  for (auto& one : now) groups[{one.stream, one.comm}].push_back(one);
  for (auto& [where, group] : groups)
    launch(where.first, [group = group] { exchange(group); });
}

ncclResult_t put(Comm* comm, cudaStream_t stream, Task task) {
  collectives.push_back({comm, stream, std::move(task)});
  return end(), ncclSuccess;
}

ncclResult_t put(bool sends, const void* bytes, size_t size, int rank, Comm* comm, cudaStream_t s) {
  messages.push_back({sends, comm, (char*)bytes, size, rank, s});
  return end(), ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t) { return "an error of a hollow GPU"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static int count = 0;
  std::snprintf((char*)id, sizeof *id, "/tmp/hollow-%d-%d", getpid(), count++);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  Comm* comm = new Comm{(char*)&id, size, rank};
  *made = (ncclComm_t)comm;
  joins.push_back([comm] { join(comm); });
  return end(), ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}
ncclResult_t ncclCommSplit(ncclComm_t whole, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  Comm* comm = (Comm*)whole;
  std::vector<int> all(2 * comm->size);
  int own[2] = {color, key}, number = comm->splits++;
  Task ask = [&] { gather(comm, (char*)own, (char*)all.data(), sizeof own); };
  hollow_without_python(&ask);
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, int>> members;
  for (int rank = 0; rank < comm->size; rank++)
    if (all[2 * rank] == color) members.push_back({all[2 * rank + 1], rank});
  std::sort(members.begin(), members.end());
  auto it = std::find(members.begin(), members.end(), std::pair(key, comm->rank));
  auto id = comm->id + "-" + std::to_string(number) + "-" + std::to_string(color & 0xffff);
  Comm* part = new Comm{id, (int)members.size(), (int)(it - members.begin())};
  Task meet = [&] { join(part); };
  hollow_without_python(&meet);
  *made = (ncclComm_t)part;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* size) {
  return *size = ((Comm*)comm)->size, ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  return *rank = ((Comm*)comm)->rank, ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  return *error = ncclSuccess, ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclGroupStart() { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd() { return depth--, end(), ncclSuccess; }

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int rank,
                      ncclComm_t comm, cudaStream_t stream) {
  return put(true, from, count * size_of(type), rank, (Comm*)comm, stream);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int rank, ncclComm_t comm,
                      cudaStream_t stream) {
  return put(false, to, count * size_of(type), rank, (Comm*)comm, stream);
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t whole, cudaStream_t stream) {
  Comm* comm = (Comm*)whole;
  return put(comm, stream, [=] {
    std::vector<char> all(count * size_of(type) * comm->size);
    gather(comm, (const char*)from, all.data(), count * size_of(type));
    reduce(all.data(), (char*)to, count, comm->size, type, op);
  });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t whole, cudaStream_t stream) {
  Comm* comm = (Comm*)whole;
  return put(comm, stream, [=] {
    size_t size = count * size_of(type), wide = size * comm->size;
    std::vector<char> all(wide * comm->size), sum(wide);
    gather(comm, (const char*)from, all.data(), wide);
    reduce(all.data(), sum.data(), count * comm->size, comm->size, type, op);
    std::memcpy(to, sum.data() + comm->rank * size, size);
  });
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t whole, cudaStream_t stream) {
  Comm* comm = (Comm*)whole;
  return put(comm, stream,
             [=] { gather(comm, (const char*)from, (char*)to, count * size_of(type)); });
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t whole, cudaStream_t stream) {
  Comm* comm = (Comm*)whole;
  size_t size = count * size_of(type);
  return put(comm, stream, [=] {
    std::vector<Message> group;
    for (int rank = 0; comm->rank == root && rank < comm->size; rank++)
      if (rank != root) group.push_back({true, comm, (char*)from, size, rank});
    if (comm->rank != root) group.push_back({false, comm, (char*)to, size, root});
    exchange(group);
    if (comm->rank == root && from != to) std::memcpy(to, from, size);
  });
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  size_t size = count * size_of(type);
  ncclGroupStart();
  for (int rank = 0; rank < ((Comm*)comm)->size; rank++) {
    put(true, (char*)from + rank * size, size, rank, (Comm*)comm, stream);
    put(false, (char*)to + rank * size, size, rank, (Comm*)comm, stream);
  }
  return ncclGroupEnd();
}
}
