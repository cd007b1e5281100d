// One file in four places: a page, its worker, its service worker, and tests.

import { base64, bytesOf, hex, join, sha256, unbase64, unhex, utf8 } from "./bytes";
import { addMask, agree, degrees, derived, publicOf, quorum, Ring, seal, secretKey, source, split, unseal } from "./crypto";
import { histories, numbered, parseCsv, readRows, uniform } from "./csv";
import { PulledMessage } from "./exchange";
import { Connection, derSignature, deviceName, parseToken, signedHeaders } from "./link";
import { DeviceModel } from "./model";
import { offer, show } from "./page";
import { Double, parseFields } from "./protobuf";
import { packRecords, parseRecords } from "./records";
import { encode } from "./secure";
import { service } from "./service";
import { Device, parseModel, recommend } from "./tasks";
import { heldOutItems, pairWeight, scatter, upload } from "./uploads";
import { work } from "./worker";

const here: any = globalThis;
if ("ServiceWorkerGlobalScope" in here) service(here);
else if ("DedicatedWorkerGlobalScope" in here) work(here);
else if ("document" in here) {
  here.fairfold = { offer }; // for a site's own script
  void show();
} else
  here.fairfold = {
    base64, bytesOf, hex, join, sha256, unbase64, unhex, utf8, addMask, agree, degrees, derived, publicOf, quorum, Ring, seal,
    secretKey, source, split, unseal, histories, numbered, parseCsv, readRows, uniform, PulledMessage, Connection,
    derSignature, deviceName, parseToken, signedHeaders, DeviceModel, Double, parseFields, packRecords, parseRecords, encode,
    Device, parseModel, recommend, heldOutItems, pairWeight, scatter, upload,
  };
