// The clients of OpenAI and Anthropic for Node.js with a tool of their own, streamed or whole.
import { execSync } from 'node:child_process';
import { createRequire } from 'node:module';

const [api, how] = process.argv.slice(2);
const require = createRequire(process.env.INSTALLED + '/');
const task = 'Write hello into out.txt and show it.';
const parameters = { type: 'object', properties: { command: { type: 'string' } } };
const where = { baseURL: process.env.BASE_URL, apiKey: process.env.KEY, maxRetries: 4 };
const run = (command) => execSync(command).toString() || '(nothing)';
const streams = how === 'stream';

// The end of a stream; one that broke is asked for once more if the caller is to do that.
async function final(ask) {
  try {
    return await ask();
  } catch (broken) {
    if (!process.env.ASKS_AGAIN) throw broken;
    console.log(`asked again after ${broken.name}`);
    return await ask();
  }
}

async function chat() {
  const OpenAI = require('openai').default;
  const client = new OpenAI(where);
  const tools = [{ type: 'function', function: { name: 'shell', parameters } }];
  const messages = [{ role: 'user', content: task }];
  for (;;) {
    const asked = { model: 'm', messages, tools };
    const answer = streams
      ? await final(() => client.chat.completions.stream(asked).finalChatCompletion())
      : await client.chat.completions.create(asked);
    const message = answer.choices[0].message;
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) {
      const content = run(JSON.parse(call.function.arguments).command);
      messages.push({ role: 'tool', tool_call_id: call.id, content });
    }
  }
}

async function responses() {
  const OpenAI = require('openai').default;
  const client = new OpenAI(where);
  const tools = [{ type: 'function', name: 'shell', parameters, strict: false }];
  const input = [{ role: 'user', content: task }];
  for (;;) {
    const asked = { model: 'm', input, tools };
    const answer = streams
      ? await final(() => client.responses.stream(asked).finalResponse())
      : await client.responses.create(asked);
    const calls = answer.output.filter((item) => item.type === 'function_call');
    input.push(...answer.output);
    if (!calls.length) return answer.output.at(-1).content[0].text;
    for (const call of calls) {
      const output = run(JSON.parse(call.arguments).command);
      input.push({ type: 'function_call_output', call_id: call.call_id, output });
    }
  }
}

async function messagesLoop() {
  const Anthropic = require('@anthropic-ai/sdk').default;
  const client = new Anthropic(where);
  const tools = [{ name: 'shell', input_schema: parameters }];
  const messages = [{ role: 'user', content: task }];
  for (;;) {
    const asked = { model: 'm', max_tokens: 1000, messages, tools };
    const answer = streams
      ? await final(() => client.messages.stream(asked).finalMessage())
      : await client.messages.create(asked);
    messages.push({ role: 'assistant', content: answer.content });
    const calls = answer.content.filter((block) => block.type === 'tool_use');
    if (!calls.length) return answer.content.at(-1).text;
    const content = calls.map((call) => ({
      type: 'tool_result',
      tool_use_id: call.id,
      content: run(call.input.command),
    }));
    messages.push({ role: 'user', content });
  }
}

const answer = await { chat, responses, messages: messagesLoop }[api]();
if (!answer.includes('All done')) throw new Error(answer);
