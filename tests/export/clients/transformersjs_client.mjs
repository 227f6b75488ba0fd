// Runs in Node with transformers.js: jobs as JSON on stdin, their tokens as JSON on stdout.
// A job is {"folder": …, "batch": [prompt, …], "new": n}: prompts padded on the left with their own mask;
// or {"folder": …, "text": …, "image": path, "new": n}: a prompt with an image, prepared by the client's own processor.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const { AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, RawImage, Tensor, env } = createRequire(
  `${process.cwd()}/`,
)('@huggingface/transformers');
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

async function see({ folder, text, image, new: max_new_tokens, options }) {
  const processor = await AutoProcessor.from_pretrained(folder);
  const model = await AutoModelForImageTextToText.from_pretrained(folder, options ?? {});
  const inputs = await processor(await RawImage.read(image), text);
  const tokens = await model.generate({ ...inputs, max_new_tokens, do_sample: false });
  await model.dispose();
  return tokens.tolist()[0].slice(inputs.input_ids.dims[1]).map(Number);
}

const results = [];
for (const job of JSON.parse(readFileSync(0, 'utf8'))) results.push(await (job.image ? see(job) : run(job)));
console.log(JSON.stringify(results));
