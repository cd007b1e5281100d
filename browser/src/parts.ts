// What tests look at: the parts of the device, built like the page (tests/device/browser_parts.js).

import { base64, bytesOf, hex, join, sha256, unbase64, unhex, utf8 } from "./bytes";
import { addMask, agree, degrees, derived, publicOf, quorum, Ring, seal, secretKey, source, split, unseal } from "./crypto";
import { histories, numbered, parseCsv, readRows, uniform } from "./csv";
import { PulledMessage } from "./exchange";
import { Connection, derSignature, deviceName, parseToken, signedHeaders } from "./link";
import { Loop } from "./loop";
import { DeviceModel } from "./model";
import { Double, parseFields } from "./protobuf";
import { packRecords, parseRecords } from "./records";
import { encode } from "./secure";
import { Device, parseModel, recommend } from "./tasks";
import { heldOutItems, pairWeight, scatter, upload } from "./uploads";

Object.assign(globalThis, {
  fairfold: {
    base64, bytesOf, hex, join, sha256, unbase64, unhex, utf8, addMask, agree, degrees, derived, publicOf, quorum, Ring, seal,
    secretKey, source, split, unseal, histories, numbered, parseCsv, readRows, uniform, PulledMessage, Connection,
    derSignature, deviceName, parseToken, signedHeaders, Loop, DeviceModel, Double, parseFields, packRecords, parseRecords, encode,
    Device, parseModel, recommend, heldOutItems, pairWeight, scatter, upload,
  },
});
