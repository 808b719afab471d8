package org.apache.iceberg.rest;

import com.sun.net.httpserver.HttpServer;
import java.io.OutputStream;
import java.net.InetSocketAddress;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.Executors;
import org.apache.iceberg.inmemory.InMemoryCatalog;
import org.apache.iceberg.rest.responses.ErrorResponse;
import org.apache.iceberg.rest.responses.ErrorResponseParser;
import org.apache.iceberg.util.Pair;

/** Iceberg's own REST catalog, of its tests, over HTTP; prints its port. */
public class IcebergRest {
  public static void main(String[] arguments) throws Exception {
    InMemoryCatalog catalog = new InMemoryCatalog();
    catalog.initialize("rest", Map.of("warehouse", "file:///nowhere"));
    RESTCatalogAdapter adapter = new RESTCatalogAdapter(catalog);
    HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
    server.setExecutor(Executors.newFixedThreadPool(4));
    server.createContext("/", exchange -> {
      byte[] answer = new byte[0];
      int status = 200;
      try {
        String path = exchange.getRequestURI().getRawPath().substring(1);
        HTTPRequest.HTTPMethod method = HTTPRequest.HTTPMethod.valueOf(exchange.getRequestMethod());
        Pair<RESTCatalogAdapter.Route, Map<String, String>> found = RESTCatalogAdapter.Route.from(method, path);
        Map<String, String> variables = new HashMap<>(found.second());
        String query = exchange.getRequestURI().getRawQuery();
        for (String each : query == null ? new String[0] : query.split("&")) {
          String[] parts = each.split("=", 2);
          variables.put(parts[0], URLDecoder.decode(parts.length > 1 ? parts[1] : "", StandardCharsets.UTF_8));
        }
        byte[] sent = exchange.getRequestBody().readAllBytes();
        Object body = found.first().requestClass() == null || sent.length == 0 ? null
            : RESTObjectMapper.mapper().readValue(sent, found.first().requestClass());
        RESTResponse response = adapter.handleRequest(found.first(), variables, body, (Class) found.first().responseClass());
        if (response != null) {
          answer = RESTObjectMapper.mapper().writeValueAsBytes(response);
        } else {
          status = 204;
        }
      } catch (Exception error) {
        ErrorResponse.Builder builder = ErrorResponse.builder();
        RESTCatalogAdapter.configureResponseFromException(error, builder);
        ErrorResponse response = builder.build();
        status = response.code() < 400 ? 500 : response.code();
        answer = ErrorResponseParser.toJson(response).getBytes(StandardCharsets.UTF_8);
      }
      exchange.getResponseHeaders().set("Content-Type", "application/json");
      boolean bare = exchange.getRequestMethod().equals("HEAD") || status == 204;
      exchange.sendResponseHeaders(status, bare ? -1 : answer.length);
      if (!bare) {
        try (OutputStream out = exchange.getResponseBody()) {
          out.write(answer);
        }
      }
      exchange.close();
    });
    server.start();
    System.out.println(server.getAddress().getPort());
  }
}
