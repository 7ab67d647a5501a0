// Runs Perfetto's trace processor, as its web page has it, without a browser: requests of its RPC protocol come in on
// standard input and its responses go out on standard output, each behind its length as four bytes.
//
//     node trace_processor.js FOLDER        with engine_bundle.js and trace_processor.wasm in the folder
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const file = (name) => fs.readFileSync(path.join(folder, path.basename(String(name))));

class FileRequest {
  open(_method, name) {
    this.name = name;
  }
  send() {
    const data = file(this.name);
    this.status = 200;
    this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
  }
}

// The bundle is a web worker, which looks for these. It has to run in this realm: it tells errors of WebAssembly by class.
Object.assign(globalThis, {
  self: globalThis,
  location: { href: "http://localhost/engine_bundle.js" },
  WorkerGlobalScope: Object,
  XMLHttpRequest: FileRequest,
  fetch: async (name) => new Response(file(name), { headers: { "Content-Type": "application/wasm" } }),
});
console.log = console.info = console.debug = () => {};
vm.runInThisContext(`(function (process) { ${file("engine_bundle.js")} \n})`)(); // which is not to find that this is node

const port = {
  postMessage(reply) {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(reply.length);
    fs.writeSync(1, Buffer.concat([length, Buffer.from(reply)]));
  },
};
globalThis.onmessage({ data: port });

let waiting = Buffer.alloc(0);
process.stdin.on("data", (data) => {
  waiting = Buffer.concat([waiting, data]);
  while (waiting.length >= 4 && waiting.length >= 4 + waiting.readUInt32LE()) {
    const end = 4 + waiting.readUInt32LE();
    port.onmessage({ data: new Uint8Array(waiting.subarray(4, end)) });
    waiting = waiting.subarray(end);
  }
});
