// The calls of libcuda that Paceline makes, on main memory: allocations are memfds, so that other
// processes can map them. It fails on request, and counts what is not freed. One thread uses it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK, INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE = 400, NOT_SUPPORTED = 801 };
enum { HANDLES, RESERVED, MAPPED, ALLOCATED, OPENED, CONTEXTS, KINDS };
enum { UNIT = 65536, DEVICES = 2, SLOTS = 64 };

typedef struct {
  int type, id;
} Location;
typedef struct {
  int type, handle_types;
  Location location;
  void *win32;
  unsigned char flags[8];
} Prop;
typedef struct {
  Location location;
  int flags;
} Access;
typedef struct {
  int pid, file, device;
  uint64_t address, size;
} Handle;
typedef struct {
  uint64_t address, size;
  int kind, file, device, mapped;
  Handle of;
} Slot;

static Slot slots[SLOTS];
static int contexts, linked, current;

long stub_calls;        // calls so far
long stub_failing = -1; // the call of this number fails
char stub_refused[64];  // calls of this name fail
long stub_no_read;      // nothing can be mapped for reading only
long stub_access;       // what was granted last
long stub_reader;       // the device that got it

int stub_live(int kind) {
  int count = 0;
  for (int i = 0; i < SLOTS; i++)
    count += kind == MAPPED ? slots[i].mapped : slots[i].address && slots[i].kind == kind;
  return kind == CONTEXTS ? contexts : count;
}
void stub_link(int reader, int other) { linked |= 1 << (reader * DEVICES + other); }
void stub_reset(void) {
  stub_calls = 0;
  stub_failing = -1;
  stub_refused[0] = 0;
  linked = stub_access = stub_no_read = 0;
}
void stub_forget(void) { // what could not be freed
  for (int i = 0; i < SLOTS; i++) {
    if (slots[i].address && slots[i].file >= 0) close(slots[i].file);
    slots[i] = (Slot){0};
  }
}

static int checked(const char *name) {
  if (stub_calls++ == stub_failing) return 999;
  return strcmp(name, stub_refused) ? OK : NOT_SUPPORTED;
}
#define CALL                         \
  do {                               \
    int status_ = checked(__func__); \
    if (status_) return status_;     \
  } while (0)
#define NEED(condition, status)      \
  do {                               \
    if (!(condition)) return status; \
  } while (0)

static Slot *find(uint64_t address, int kind) {
  for (int i = 0; i < SLOTS; i++)
    if (address && slots[i].address == address && slots[i].kind == kind) return slots + i;
  return 0;
}
static Slot *take(int kind, uint64_t address, uint64_t size, int file) {
  for (int i = 0; i < SLOTS; i++)
    if (!slots[i].address) {
      slots[i] = (Slot){.address = address, .size = size, .kind = kind, .file = file};
      return slots + i;
    }
  return 0;
}
static int new_file(uint64_t size) {
  int file = size > 1 << 30 ? -1 : memfd_create("gpu", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, size)) return -1;
  return file;
}
static uint64_t place(uint64_t size, int file, int protection) {
  void *found =
      mmap(0, size, protection, file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
  return found == MAP_FAILED ? 0 : (uint64_t)found;
}

int cuGetErrorString(int status, const char **text) {
  *text = status == OUT_OF_MEMORY   ? "out of memory"
          : status == NOT_SUPPORTED ? "not supported"
                                    : "as asked";
  return OK;
}
int cuInit(unsigned flags) {
  CALL;
  return OK;
}
int cuDeviceGetCount(int *count) {
  CALL;
  *count = DEVICES;
  return OK;
}
int cuDeviceGet(int *device, int ordinal) {
  CALL;
  NEED(ordinal >= 0 && ordinal < DEVICES, 101);
  *device = ordinal;
  return OK;
}
int cuDeviceGetUuid_v2(char *uuid, int device) {
  CALL;
  memset(uuid, 'A' + device, 16);
  return OK;
}
int cuDeviceCanAccessPeer(int *can, int reader, int other) {
  CALL;
  *can = linked >> (reader * DEVICES + other) & 1;
  return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  CALL;
  *context = (void *)(intptr_t)(device + 1);
  return OK;
}
int cuCtxPushCurrent_v2(void *context) {
  CALL;
  NEED(context, 201);
  contexts++;
  current = (int)(intptr_t)context - 1;
  return OK;
}
int cuCtxPopCurrent_v2(void **context) {
  contexts--;
  CALL;
  return OK;
}

int cuMemGetAllocationGranularity(size_t *unit, const Prop *prop, int option) {
  CALL;
  NEED(prop->type == 1 && prop->location.type == 1 && !option, INVALID_VALUE);
  *unit = UNIT;
  return OK;
}
int cuMemCreate(uint64_t *handle, size_t size, const Prop *prop, unsigned long long flags) {
  CALL;
  NEED(size && size % UNIT == 0 && prop->handle_types == 1 && !flags, INVALID_VALUE);
  int file = new_file(size);
  NEED(file >= 0, OUT_OF_MEMORY);
  *handle = 1000 + file;
  take(HANDLES, *handle, size, file);
  return OK;
}
int cuMemExportToShareableHandle(int *file, uint64_t handle, int type, unsigned long long flags) {
  CALL;
  Slot *slot = find(handle, HANDLES);
  NEED(slot && type == 1 && !flags, INVALID_VALUE);
  *file = dup(slot->file);
  return OK;
}
int cuMemImportFromShareableHandle(uint64_t *handle, void *passed, int type) {
  CALL;
  struct stat found;
  int file = fcntl((int)(intptr_t)passed, F_DUPFD_CLOEXEC, 0);
  NEED(type == 1 && file >= 0 && !fstat(file, &found), INVALID_VALUE);
  *handle = 1000 + file;
  take(HANDLES, *handle, found.st_size, file);
  return OK;
}
int cuMemRelease(uint64_t handle) {
  CALL;
  Slot *slot = find(handle, HANDLES);
  NEED(slot, INVALID_VALUE);
  close(slot->file);
  slot->address = 0;
  return OK;
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t align, uint64_t near,
                        unsigned long long flags) {
  CALL;
  NEED(size && size % UNIT == 0 && !align && !near && !flags, INVALID_VALUE);
  *address = place(size, -1, PROT_NONE);
  NEED(*address, OUT_OF_MEMORY);
  take(RESERVED, *address, size, -1);
  return OK;
}
int cuMemAddressFree(uint64_t address, size_t size) {
  CALL;
  Slot *slot = find(address, RESERVED);
  NEED(slot && slot->size == size && !slot->mapped, INVALID_VALUE);
  munmap((void *)address, size);
  slot->address = 0;
  return OK;
}
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle,
             unsigned long long flags) {
  CALL;
  Slot *slot = find(address, RESERVED), *memory = find(handle, HANDLES);
  NEED(slot && !slot->mapped && memory && size <= slot->size && !offset && !flags, INVALID_VALUE);
  NEED(size <= memory->size, INVALID_VALUE);
  mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->file, 0);
  slot->mapped = 1;
  return OK;
}
int cuMemUnmap(uint64_t address, size_t size) {
  CALL;
  Slot *slot = find(address, RESERVED);
  NEED(slot && slot->mapped, INVALID_VALUE);
  mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  slot->mapped = 0;
  return OK;
}
int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
  CALL;
  Slot *slot = find(address, RESERVED);
  NEED(slot && slot->mapped && count == 1 && access->location.type == 1, INVALID_VALUE);
  if (stub_no_read && access->flags == 1) return NOT_SUPPORTED;
  stub_access = access->flags;
  stub_reader = access->location.id;
  mprotect((void *)address, size, stub_access == 3 ? PROT_READ | PROT_WRITE : PROT_READ);
  return OK;
}

int cuMemAlloc_v2(uint64_t *address, size_t size) {
  CALL;
  NEED(contexts, 201);
  int file = new_file(size);
  NEED(file >= 0, OUT_OF_MEMORY);
  *address = place(size, file, PROT_READ | PROT_WRITE);
  take(ALLOCATED, *address, size, file);
  return OK;
}
int cuMemFree_v2(uint64_t address) {
  CALL;
  Slot *slot = find(address, ALLOCATED);
  NEED(slot && contexts, INVALID_VALUE);
  munmap((void *)address, slot->size);
  close(slot->file);
  slot->address = 0;
  return OK;
}
int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
  CALL;
  Slot *slot = find(address, ALLOCATED);
  NEED(slot, INVALID_VALUE);
  memset(handle, 0, 64);
  *handle = (Handle){getpid(), slot->file, 0, address, slot->size};
  return OK;
}
int cuIpcOpenMemHandle_v2(
    uint64_t *address, struct { unsigned char bytes[64]; } passed, unsigned flags) {
  CALL;
  NEED(flags == 1, INVALID_VALUE);
  Handle handle;
  char path[64];
  memcpy(&handle, &passed, sizeof handle);
  for (int i = 0; i < SLOTS; i++) // a process opens each only once
    if (slots[i].address && slots[i].kind == OPENED && slots[i].of.address == handle.address)
      return 208;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.file);
  int file = handle.pid ? open(path, O_RDWR | O_CLOEXEC) : -1;
  NEED(file >= 0, INVALID_HANDLE);
  *address = place(handle.size, file, PROT_READ | PROT_WRITE);
  stub_reader = current;
  take(OPENED, *address, handle.size, file)->of = handle;
  return OK;
}
int cuIpcCloseMemHandle(uint64_t address) {
  CALL;
  Slot *slot = find(address, OPENED);
  NEED(slot, INVALID_VALUE);
  munmap((void *)address, slot->size);
  close(slot->file);
  slot->address = 0;
  return OK;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
  CALL;
  Slot *slot = find(address, OPENED);
  NEED(slot, INVALID_VALUE);
  *base = address;
  *size = slot->size;
  return OK;
}
