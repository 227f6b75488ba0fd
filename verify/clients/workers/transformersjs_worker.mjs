// Runs in Node with transformers.js; see `client.Client.generate` for what it reads and writes.
// Prompts are padded on the left, with their own mask. The package is that of the folder that is given, or a global one;
// never that of the current folder, which may be a downloaded model.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, resolve } from 'node:path';

const int64 = (Tensor, rows) =>
  new Tensor('int64', BigInt64Array.from(rows.flat().map(BigInt)), [rows.length, rows[0].length]);

async function generate({ AutoModelForCausalLM, Tensor }, { folder, batches, new: max_new_tokens }) {
  const model = await AutoModelForCausalLM.from_pretrained(folder);
  const given = model.generation_config?.eos_token_id ?? model.config.eos_token_id ?? [];
  const own = model.generation_config ?? {};
  for (const name of Object.keys(own)) if (name !== 'eos_token_id') delete own[name]; // greedy, whatever else is set
  const rows = [];
  for (const prompts of batches) {
    const longest = Math.max(...prompts.map((prompt) => prompt.length));
    const padded = (fill) => prompts.map((prompt) => [...Array(longest - prompt.length).fill(0), ...fill(prompt)]);
    const input_ids = int64(Tensor, padded((prompt) => prompt));
    const attention_mask = int64(Tensor, padded((prompt) => prompt.map(() => 1)));
    const found = await model.generate({ input_ids, attention_mask, max_new_tokens, do_sample: false });
    rows.push(found.tolist().map((row) => row.slice(longest).map(Number)));
  }
  await model.dispose();
  return { ends: [given].flat(), rows };
}

const request = JSON.parse(readFileSync(0, 'utf8'));
let library;
try {
  const place = process.argv[2] ?? resolve(dirname(process.execPath), '../lib');
  library = createRequire(`${resolve(place)}/`)('@huggingface/transformers');
} catch (error) {
  if (error.code !== 'MODULE_NOT_FOUND') throw error;
  console.log(JSON.stringify({ missing: error.message.split('\n')[0] }));
  process.exit();
}
library.env.allowRemoteModels = false;
const versions = { '@huggingface/transformers': library.env.version };
console.log(JSON.stringify({ versions, ...(request.folder ? await generate(library, request) : {}) }));
