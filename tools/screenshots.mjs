// A screenshot of a page: URL FILE [TEXT]. With a text, the chat page first continues it.
import { createRequire } from 'node:module';

const require = createRequire(`${process.cwd()}/`);
const chromium = (await import(require.resolve('@sparticuz/chromium'))).default;
const { default: puppeteer } = await import(require.resolve('puppeteer-core'));

const [url, path, text] = process.argv.slice(2);
const browser = await puppeteer.launch({
  executablePath: await chromium.executablePath(),
  args: chromium.args,
  headless: 'shell',
  defaultViewport: { width: 1000, height: text ? 420 : 900 },
});
const page = await browser.newPage();
await page.goto(url, { waitUntil: 'load' });
if (text) {
  await page.waitForFunction(() => document.getElementById('model').textContent !== 'llmconv');
  await page.click('summary');
  await page.select('#mode', 'text');
  await page.type('#limit', '60');
  await page.click('summary');
  await page.type('#text', `${text}\n`);
  await page.waitForFunction(() => document.getElementById('log').textContent.includes(' tokens'));
  await page.evaluate(() => document.activeElement.blur());
}
await page.screenshot({ path });
await browser.close();
