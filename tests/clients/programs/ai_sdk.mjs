// Vercel's AI SDK: its own loop with one tool, over each of the three protocols.
import { execSync } from 'node:child_process';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [api, how] = process.argv.slice(2);
const require = createRequire(process.env.INSTALLED + '/');
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, tool, stepCountIs, isStepCount } = await load('ai');
const { z } = await load('zod');
const where = { baseURL: process.env.BASE_URL, apiKey: process.env.KEY };
let model;
if (api === 'messages') {
  model = (await load('@ai-sdk/anthropic')).createAnthropic(where)('m');
} else if (api === 'responses') {
  model = (await load('@ai-sdk/openai')).createOpenAI(where).responses('m');
} else if (how === 'compatible') {
  const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
  model = createOpenAICompatible({ ...where, name: 'gateway' })('m');
} else {
  model = (await load('@ai-sdk/openai')).createOpenAI(where).chat('m');
}
const asked = {
  model,
  prompt: 'Write hello into out.txt and show it.',
  stopWhen: (stepCountIs ?? isStepCount)(5),
  maxRetries: 4,
  tools: {
    shell: tool({
      description: 'run a command',
      inputSchema: z.object({ command: z.string() }),
      execute: async ({ command }) => execSync(command).toString() || '(nothing)',
    }),
  },
};
const answer = how === 'stream' ? await streamText(asked).text : (await generateText(asked)).text;
if (!answer.includes('All done')) throw new Error(answer);
