// Runs transformers.js on WebGPU in a headless Chromium: a request on stdin, the page's answer on stdout.
// {transformersjs, chromium: folders of the environments, folder, dtype, batches, new, flags, driver: a Vulkan driver's manifest}
import { copyFileSync, createReadStream, existsSync, readFileSync, rmSync, statSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { dirname, extname, join, normalize } from 'node:path';
import { pathToFileURL } from 'node:url';

const request = JSON.parse(readFileSync(0, 'utf8'));
const modules = join(request.transformersjs, 'node_modules');
const roots = {
  library: join(modules, '@huggingface/transformers/dist'),
  ort: join(modules, 'onnxruntime-web/dist'),
  model: request.folder,
};
const types = { '.js': 'text/javascript', '.mjs': 'text/javascript', '.wasm': 'application/wasm', '.json': 'application/json' };

async function inThePage({ dtype, batches, new: max_new_tokens }) {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) return { missing: 'no WebGPU adapter' };
  const { AutoModelForCausalLM, Tensor, env } = await import('/library/transformers.min.js');
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: '/', useBrowserCache: false });
  env.backends.onnx.wasm.wasmPaths = `${location.origin}/ort/`;
  env.backends.onnx.wasm.numThreads = 1;
  const int64 = (rows) => new Tensor('int64', BigInt64Array.from(rows.flat().map(BigInt)), [rows.length, rows[0].length]);
  const model = await AutoModelForCausalLM.from_pretrained('model', { device: 'webgpu', dtype });
  const rows = [];
  for (const prompts of batches) {
    const longest = Math.max(...prompts.map((prompt) => prompt.length));
    const padded = (fill) => prompts.map((prompt) => [...Array(longest - prompt.length).fill(0), ...fill(prompt)]);
    const inputs = { input_ids: int64(padded((prompt) => prompt)), attention_mask: int64(padded((prompt) => prompt.map(() => 1))) };
    const found = await model.generate({ ...inputs, max_new_tokens, do_sample: false, eos_token_id: null });
    rows.push(found.tolist().map((row) => row.slice(longest).map(Number)));
  }
  return { version: env.version, adapter: [adapter.info.vendor, adapter.info.architecture], features: [...adapter.features], rows };
}

const server = createServer((asked, answer) => {
  const [, root, ...rest] = normalize(decodeURIComponent(asked.url.split('?')[0])).split('/');
  const path = roots[root] && join(roots[root], ...rest);
  if (!root) return answer.setHeader('content-type', 'text/html').end('<!doctype html><title>WebGPU</title>');
  if (!path || !existsSync(path)) return answer.writeHead(404).end();
  answer.setHeader('content-type', types[extname(path)] ?? 'application/octet-stream').setHeader('content-length', statSync(path).size);
  return asked.method === 'HEAD' ? answer.end() : createReadStream(path).pipe(answer);
});
await new Promise((done) => server.listen(0, '127.0.0.1', done));
const chromium = createRequire(`${request.chromium}/`);
const { default: program } = await import(pathToFileURL(chromium.resolve('@sparticuz/chromium')));
const { default: puppeteer } = await import(pathToFileURL(chromium.resolve('puppeteer-core')));
const args = ['--no-sandbox', '--no-first-run', '--disable-background-networking', ...request.flags];
const executablePath = await program.executablePath();
if (request.driver) {
  copyFileSync(request.driver, join(dirname(executablePath), 'vk_swiftshader_icd.json'));
  rmSync(join(dirname(executablePath), 'libvk_swiftshader.so'));  // it would be a second adapter of the same ids
}
const browser = await puppeteer.launch({ executablePath, headless: 'shell', args });
try {
  const page = await browser.newPage();
  page.on('console', (line) => console.error(line.text()));
  page.on('pageerror', (error) => console.error(error.message));
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  console.log(JSON.stringify(await page.evaluate(inThePage, request)));
} finally {
  await browser.close();
  server.close();
}
