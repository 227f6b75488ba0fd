// Runs in Node with transformers.js: jobs as JSON on stdin, their tokens as JSON on stdout.
// A job is {"folder": …, "batch": [prompt, …], "new": n}: prompts padded on the left with their own mask.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const { AutoModelForCausalLM, Tensor, env } = createRequire(`${process.cwd()}/`)('@huggingface/transformers');
env.allowRemoteModels = false;

const int64 = (rows) => new Tensor('int64', BigInt64Array.from(rows.flat().map(BigInt)), [rows.length, rows[0].length]);

async function run({ folder, batch, new: max_new_tokens, options }) {
  const model = await AutoModelForCausalLM.from_pretrained(folder, options ?? {});
  const longest = Math.max(...batch.map((prompt) => prompt.length));
  const padding = batch.map((prompt) => Array(longest - prompt.length).fill(0));
  const input_ids = int64(batch.map((prompt, row) => [...padding[row], ...prompt]));
  const attention_mask = int64(batch.map((prompt, row) => [...padding[row], ...prompt.map(() => 1)]));
  const tokens = await model.generate({ input_ids, attention_mask, max_new_tokens, do_sample: false });
  await model.dispose();
  return tokens.tolist().map((row) => row.slice(longest).map(Number));
}

const results = [];
for (const job of JSON.parse(readFileSync(0, 'utf8'))) results.push(await run(job));
console.log(JSON.stringify(results));
