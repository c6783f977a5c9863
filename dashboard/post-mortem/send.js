// Owns: sending a recorded file from one's own disk to the server, which opens it in its sealed
// process, and how far that is. Called by: page.js. The file's name stays here: the server gives
// it one. fetch tells nothing of a body on its way, XMLHttpRequest does.

import { ApiError, errorOf } from '../api.js';
import { int } from '../format.js';

const MIB = 2 ** 20;
const BROKE = 'The server broke off: it is gone, or the file is too large for it.';

// bytesMax: what the server takes at most; onProgress(share). Resolves to {name, bytes}.
export function send(url, file, { bytesMax = Infinity, onProgress = () => {} } = {}) {
  if (file.size > bytesMax) {
    const [size, most] = [file.size, bytesMax].map((bytes) => `${int(bytes / MIB)} MiB`);
    const words = `${size}; this server takes at most ${most} (--file-bytes-max).`;
    return Promise.reject(new ApiError(words, { status: 413 }));
  }
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open('POST', url);
    request.upload.addEventListener('progress', ({ loaded, total }) => onProgress(loaded / total));
    request.addEventListener('error', () => reject(new ApiError(BROKE)));
    request.addEventListener('load', () => {
      if (request.status === 200) resolve(JSON.parse(request.responseText));
      else reject(errorOf(request.status, request.responseText));
    });
    request.send(file);
  });
}
