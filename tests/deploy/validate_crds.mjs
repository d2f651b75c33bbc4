// Validates custom resources, JSON objects on standard input, one a line; prints what is wrong with them.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const installed = pathToFileURL(`${process.argv[2]}/node_modules/@kubernetes-models/`);
const models = {
  ...(await import(new URL("prometheus-operator/monitoring.coreos.com/v1/index.js", installed))),
  ...(await import(new URL("cert-manager/cert-manager.io/v1/index.js", installed))),
};

for await (const line of createInterface({ input: process.stdin })) {
  const object = JSON.parse(line);
  try {
    new models[object.kind](object).validate();
  } catch (error) {
    console.log(`${object.kind} ${object.metadata.name}: ${error.message}`);
  }
}
