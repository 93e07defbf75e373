// Perfetto's trace processor (its WebAssembly build) behind a pipe: requests come in on stdin, answers go out on stdout,
// both as serialized TraceProcessorRpcStream messages. Usage: node trace_processor.mjs trace_processor.wasm
import fs from "node:fs";

const BUFFER_BYTES = 32 * 1024 * 1024; // of a request; the trace processor puts longer ones together
const PAGE_BYTES = 64 * 1024;
const NO_SUCH_CALL = -52; // WASI's ENOSYS, negative as a system call returns it

let memory;
const view = () => new DataView(memory.buffer);

function writeAll(descriptor, bytes) {
  for (let written = 0; written < bytes.length; ) {
    try {
      written += fs.writeSync(descriptor, bytes, written);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error;
    }
  }
}

// What the module asks of its host beyond memory: a clock, a place for its messages, no files and no environment.
const host = {
  emscripten_get_now: () => performance.now(),
  emscripten_date_now: () => Date.now(),
  emscripten_get_heap_max: () => 2 ** 32 - PAGE_BYTES,
  emscripten_resize_heap: (bytes) => {
    memory.grow(Math.ceil(((bytes >>> 0) - memory.buffer.byteLength) / PAGE_BYTES));
    return 1;
  },
  clock_time_get: (clock, precision, at) => {
    view().setBigUint64(at, process.hrtime.bigint(), true);
    return 0;
  },
  environ_sizes_get: (count, bytes) => {
    view().setUint32(count, 0, true);
    view().setUint32(bytes, 0, true);
    return 0;
  },
  environ_get: () => 0,
  fd_write: (descriptor, parts, count, written) => {
    let total = 0;
    for (let i = 0; i < count; i++) {
      const start = view().getUint32(parts + 8 * i, true);
      const length = view().getUint32(parts + 8 * i + 4, true);
      writeAll(2, new Uint8Array(memory.buffer, start, length));
      total += length;
    }
    view().setUint32(written, total, true);
    return 0;
  },
  _abort_js: () => { throw new Error("aborted"); },
  __assert_fail: () => { throw new Error("an assertion failed"); },
};
const imports = new Proxy({}, { get: (_, name) => host[name] ?? (() => NO_SUCH_CALL) });

// A function for the module's table must be one of WebAssembly: a module of (i32, i32) -> () that hands on its import.
function callable(handler) {
  const bytes = [
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0, 1, 6, 1, 0x60, 2, 0x7f, 0x7f, 0, 2, 7, 1, 1, 0x65, 1, 0x66, 0, 0,
    7, 5, 1, 1, 0x66, 0, 0,
  ];
  return new WebAssembly.Instance(new WebAssembly.Module(new Uint8Array(bytes)), { e: { f: handler } }).exports.f;
}

const compiled = new WebAssembly.Module(fs.readFileSync(process.argv[2]));
const { exports } = new WebAssembly.Instance(compiled, { env: imports, wasi_snapshot_preview1: imports });
memory = exports.memory;
exports.emscripten_stack_init();
exports.__wasm_call_ctors();
exports.__main_argc_argv(0, 0);

const table = exports.__indirect_function_table;
const answer = table.grow(1);
table.set(answer, callable((at, length) => writeAll(1, new Uint8Array(memory.buffer, at >>> 0, length))));
const buffer = exports.trace_processor_rpc_init(answer, BUFFER_BYTES) >>> 0;

const chunk = Buffer.alloc(1 << 20);
for (;;) {
  let length;
  try {
    length = fs.readSync(0, chunk, 0, chunk.length);
  } catch (error) {
    if (error.code === "EAGAIN") continue;
    throw error;
  }
  if (!length) break;
  new Uint8Array(memory.buffer, buffer, length).set(chunk.subarray(0, length));
  exports.trace_processor_on_rpc_request(length);
}
